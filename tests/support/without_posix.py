"""A Python without what Windows lacks: a program that begins with `BLOCK` runs in it."""

from __future__ import annotations

BLOCK = '''
import builtins, io, os, shutil, signal, sys, tempfile

for module in ("fcntl", "resource", "pwd", "grp", "termios", "syslog"):
    sys.modules[module] = None
for name in ("pread", "preadv", "pwrite", "pwritev", "readv", "writev", "getloadavg", "fchmod",
             "sched_getaffinity", "set_blocking", "getuid", "geteuid", "mkfifo", "sysconf",
             "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_SYNC", "supports_dir_fd"):
    delattr(os, name)
for name in ("SIGALRM", "SIGHUP", "SIGPIPE", "SIGUSR1", "setitimer", "alarm", "ITIMER_REAL"):
    delattr(signal, name)
shutil._use_fd_functions = False
TEMPORARY = tempfile.gettempdir()

def without_folders(path, flags, mode=0o777, *, dir_fd=None, plain=os.open):
    """Open no folder, and nothing in one that is open."""
    if dir_fd is not None:
        raise NotImplementedError("dir_fd unavailable on this platform")
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return plain(path, flags, mode)

def without_proc(file, *args, plain=io.open, **more):
    """Open no file of Linux that tells of processes."""
    if str(file).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", file)
    return plain(file, *args, **more)

def unless_open(function):
    """Replace and remove no file that this process has open, but for temporary ones, which
    Windows removes when they are closed.
    """
    def refusing(*paths, **more):
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                opened = os.readlink(f"/proc/self/fd/{descriptor}")
            except OSError:
                continue
            if os.path.dirname(opened) == TEMPORARY:
                continue
            if opened in [os.path.abspath(os.fsdecode(path)) for path in paths]:
                raise PermissionError(13, "The file is in use", *paths[:1])
        return function(*paths, **more)
    return refusing

os.open = without_folders
io.open = builtins.open = without_proc
for name in ("replace", "rename", "unlink", "remove"):
    setattr(os, name, unless_open(getattr(os, name)))
'''
RUN_EACH = f"""{BLOCK}
import json
from quantizer.cli.main import main

folder, commands = json.loads(sys.argv[1])
commands.append(sys.argv[2:])
for number, words in enumerate(commands):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    shutil.copytree(folder, f"{{folder}}.{{number}}")
"""
"""Runs commands one after the other, and copies a folder after each: the first commands come as
JSON, the last one as the words of the command line.
"""
