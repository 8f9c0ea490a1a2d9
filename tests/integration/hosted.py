"""Servers of one kind, forked from a process that has imported what they are: seconds in place of half a minute.

It imports nothing but the standard library: servers have environments of their own.
"""

import json
import os
import signal
import sys
import threading
import traceback


def host(start):
    """Fork a process that calls `start` for each line of standard input, and write its number.

    A line is JSON: `arguments` of the command line, and the file that its `log` goes to.
    """
    assert threading.active_count() == 1, threading.enumerate()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that end leave no zombies
    for line in sys.stdin:
        told = json.loads(line)
        number = os.fork()
        if not number:
            _become(start, told)
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


def _become(start, told):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for here, there in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(here, there)
    sys.argv[1:] = told["arguments"]
    code = 1
    try:
        start()
        code = 0
    except BaseException:  # noqa: BLE001 - whose end this is
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
