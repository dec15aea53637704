"""Files of other users, and child processes, for tests of permissions.

As root, tests give a file to another user, or run a child process as another user. As any other
user, they replace the id that this process sees as its own.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from pathlib import Path

NOBODY = 65534


def give_away(path, monkeypatch):
    """Makes `path` belong to a user other than the one that this process seems to be."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    else:
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)


def public_folder():
    """Returns a new folder that every user can reach and write to."""
    folder = Path(tempfile.mkdtemp(prefix="test-cache-"))
    folder.chmod(0o777)
    return folder


def in_a_child(function, *arguments, user=None):
    """Returns the result of `function` in a forked process. If this process is root, the fork runs
    as `user`."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def run():
        try:
            if user is not None and os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
            answers.put((True, function(*arguments)))
        except BaseException:
            answers.put((False, traceback.format_exc()))

    child = context.Process(target=run)
    child.start()
    good, answer = answers.get(timeout=60)
    child.join()
    assert good, answer
    return answer
