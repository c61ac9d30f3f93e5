"""A client of NFS 4 in one process (libnfs), for tests in network namespaces: `python nfs_client.py URL COMMAND …`.

Commands: `read PATH`, `write PATH TEXT`, `remove PATH`, `lock PATH` (waits for the lock, and holds it until its input
ends) and `try PATH` (the same without waiting). Prints one word: `ok`, `locked`, or the error's name, such as EACCES.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

#: libnfs's numbers of its operations.
_LOCKING = {"lock": 0, "try": 1}
#: Bytes that are locked.
_RANGE = 1


class _Url(ctypes.Structure):
    _fields_ = (("server", ctypes.c_char_p), ("path", ctypes.c_char_p), ("file", ctypes.c_char_p))


def main(url: str, command: str, path: str, text: str = "") -> None:
    """Do one command."""
    library = ctypes.CDLL("libnfs.so.13")
    library.nfs_init_context.restype = ctypes.c_void_p
    library.nfs_parse_url_dir.restype = ctypes.POINTER(_Url)
    library.nfs_parse_url_dir.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    library.nfs_lockf.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
    context = ctypes.c_void_p(library.nfs_init_context())
    parsed = library.nfs_parse_url_dir(context, url.encode())
    _check(library.nfs_mount(context, parsed.contents.server, parsed.contents.path))
    if command == "remove":
        _check(library.nfs_unlink(context, path.encode()))
        _print("ok")
        return
    flags = {"read": os.O_RDONLY, "write": os.O_CREAT | os.O_RDWR}.get(command, os.O_RDWR)
    handle = ctypes.c_void_p()
    _check(library.nfs_open(context, path.encode(), flags, ctypes.byref(handle)))
    if command == "write":
        data = text.encode()
        _check(library.nfs_write(context, handle, ctypes.c_uint64(len(data)), data))
    if command in _LOCKING:
        _check(library.nfs_lockf(context, handle, _LOCKING[command], _RANGE))
        _print("locked")
        # Until it is killed: libnfs 4.0 fails to release a lock, so that only its lease ends it.
        sys.stdin.read()
        return
    _check(library.nfs_close(context, handle))
    _print("ok")


def _check(result: int) -> None:
    if result < 0:
        _print(errno.errorcode.get(-result, str(result)))
        sys.exit(1)


def _print(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
