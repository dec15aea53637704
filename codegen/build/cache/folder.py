"""The folder of the kernel cache, the rules for trusting its files, and the private folder that
replaces it.

Files from the cache are executed. Therefore the folder and every entry must belong to this user or
to root, and other users must not be able to write to them. With TILEWRIGHT_CACHE_TRUST=1, all users
who can write to the folder are trusted; a group that shares a cache needs this. docs/soundness.md
has the threat model.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import grp
import logging
import os
import pwd
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

log = logging.getLogger("tilewright")

_GROUP_AND_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

#: The age in seconds from which an unlocked temporary folder counts as stale. The process that made
#: a stale folder was killed.
STALE_AFTER_S = 3600.0


def cache_dir() -> Path:
    """Returns the path in TILEWRIGHT_CACHE_DIR. If the variable is not set, returns `tilewright` in
    the user's XDG cache folder. Expands `~`.

    A relative XDG_CACHE_HOME is ignored, as the XDG specification requires. For a user without a
    home directory, returns a folder in the system's temporary folder.
    """
    chosen = os.environ.get("TILEWRIGHT_CACHE_DIR")
    if chosen:
        return Path(os.path.expanduser(chosen))
    base = os.path.expanduser(os.environ.get("XDG_CACHE_HOME", ""))
    if os.path.isabs(base):
        return Path(base) / "tilewright"
    home = os.path.expanduser("~")
    if os.path.isabs(home):
        return Path(home) / ".cache" / "tilewright"
    return Path(tempfile.gettempdir()) / f"tilewright-cache-{os.geteuid()}"


def others_are_trusted() -> bool:
    """Whether TILEWRIGHT_CACHE_TRUST=1 is set, so that other users may write to the cache."""
    return means_trust(os.environ.get("TILEWRIGHT_CACHE_TRUST", ""))


def means_trust(variable: str) -> bool:
    """Returns whether the text of TILEWRIGHT_CACHE_TRUST means that other users may write to the
    cache."""
    return variable == "1"


def distrust(status: os.stat_result) -> str | None:
    """Returns why a file or folder is not trusted; None if it is trusted.

    A trusted file belongs to this user or to root, and other users cannot write to it. The file's
    group cannot write to it either, unless this user is the only member of the group, as on systems
    where each user has a group.
    """
    if others_are_trusted():
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to {_user(status.st_uid)}, not to {_user(os.geteuid())}"
    mode = stat.filemode(status.st_mode)
    if status.st_mode & stat.S_IWOTH:
        return f"other users can write to it ({mode})"
    if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid, os.geteuid()):
        return f"its group {_group(status.st_gid)} can write to it ({mode})"
    return None


def refusal(root: Path) -> str | None:
    """Returns why a cache folder is not used; None if it can be used or does not exist yet."""
    try:
        own, target = os.lstat(root), os.stat(root)
    except FileNotFoundError:
        return None
    except OSError as error:
        return str(error.strerror)
    if not stat.S_ISDIR(target.st_mode):
        return "it is not a folder"
    foreign = own.st_uid not in (os.geteuid(), 0) and not others_are_trusted()
    if foreign and stat.S_ISLNK(own.st_mode):
        return f"it is a symbolic link of {_user(own.st_uid)}"
    return distrust(target)


def _user(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return f"user {pwd.getpwuid(uid).pw_name}"
    return f"user {uid}"


def _group(gid: int) -> str:
    with contextlib.suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)


@functools.cache
def _is_own_group(gid: int, uid: int) -> bool:
    """Whether a group is the user's own group: it has the user's name and no other member."""
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    alone = set(group.gr_mem) <= {user.pw_name}
    return user.pw_gid == gid and group.gr_name == user.pw_name and alone


def open_to_others(mode: int) -> int:
    """Returns the mode of a new file or folder. The group and other users may write to it only if
    other users are trusted."""
    return mode if others_are_trusted() else mode & ~_GROUP_AND_OTHERS_WRITE


def make_folders(root: Path, folder: Path) -> None:
    """Makes `folder`, which is `root` or a folder below it. Raises OSError if it cannot be made."""
    if folder.is_dir():
        return
    root.parent.mkdir(parents=True, exist_ok=True)
    for one in [*reversed(folder.parents), folder]:
        if one == root or root in one.parents:
            with contextlib.suppress(FileExistsError):
                os.mkdir(one, open_to_others(0o777))


@contextlib.contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    """Opens a folder and yields its file descriptor. Raises OSError for a link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_folder(parent: Path, name: str) -> Iterator[tuple[Path, int]]:
    """Makes a temporary folder and yields its path and file descriptor.

    The folder is locked, so that no other process removes it. When the context ends, the folder is
    removed unless it was moved.
    """
    path = parent / f"{name}.{secrets.token_hex(6)}.tmp"
    os.mkdir(path, open_to_others(0o777))
    try:
        with opened_folder(path) as descriptor:
            _hold(descriptor)
            yield path, descriptor
    finally:
        remove(path)


def set_aside(path: Path) -> None:
    """Renames a file or folder in one step and then deletes it. Raises OSError if it cannot be
    renamed."""
    aside = path.with_name(f"{path.name[:16]}.{secrets.token_hex(6)}.tmp")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        remove(aside)


def remove(path: Path) -> bool:
    """Deletes a folder with its contents, a file or a link. Returns whether it is gone."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    return not os.path.lexists(path)


def _hold(descriptor: int) -> bool:
    """Locks a folder for this process until the descriptor is closed. Returns False if another
    process has locked it, else True. On a file system without locks, returns True."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def is_stale(path: Path, age: float = STALE_AFTER_S) -> bool:
    """Whether a temporary folder or lock file of the cache is at least `age` seconds old and is not
    locked by any process."""
    try:
        if time.time() - os.lstat(path).st_mtime < age:
            return False
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:  # it cannot be opened, so no process builds in it
        return True
    try:
        return _hold(descriptor)
    finally:
        os.close(descriptor)


# The private folder of each process. A forked child makes its own folder.
_private: dict[int, Path] = {}


def private_folder() -> Path:
    """Returns a private folder of this process, with mode 0700. It is removed when the process
    ends.

    The folder holds short-lived files, and it holds kernels if the cache cannot be used. Raises
    OSError if it cannot be made.
    """
    known = _private.get(os.getpid())
    if known is not None and known.is_dir():
        return known
    sweep_private()
    folder = Path(tempfile.mkdtemp(prefix=_private_prefix()))
    _hold(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))  # open until the process ends
    # `atexit` does not suffice: before Python 3.13, children that multiprocessing forks do not run
    # its functions.
    Finalize(None, remove, args=(folder,), exitpriority=0)
    _private[os.getpid()] = folder
    return folder


def _private_prefix() -> str:
    return f"tilewright-{os.geteuid()}-"


def sweep_private(age: float = STALE_AFTER_S) -> int:
    """Removes private folders of killed processes, if they are at least `age` seconds old. Returns
    how many folders it removed."""
    found = Path(tempfile.gettempdir()).glob(f"{_private_prefix()}*")
    stale = [path for path in found if _is_own(path) and is_stale(path, age)]
    return sum(remove(path) for path in stale)


def _is_own(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path).st_uid == os.geteuid()
    return False


_said: set[str] = set()


def warn_once(about: str, message: str) -> None:
    """Logs a warning, at most once per process for each `about`."""
    if about not in _said:
        _said.add(about)
        log.warning("%s", message)
