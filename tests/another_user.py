"""Other users, and processes that are not this one: what tests of permissions need.

As root, a file can be given away and a child can be another user; as anybody else, this user is
told to be another one.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from pathlib import Path

NOBODY = 65534


def give_away(path, monkeypatch):
    """From now on `path` belongs to another user than the one that this process seems to be."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    else:
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)


def public_folder():
    """A new folder that every user can reach and write to."""
    folder = Path(tempfile.mkdtemp(prefix="test-cache-"))
    folder.chmod(0o777)
    return folder


def in_a_child(function, *arguments, user=None):
    """What `function` returns in a forked process; one of user `user` where this one is root."""
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
