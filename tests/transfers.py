"""Transfers to engines elsewhere: a fault of slices on their way, and what has to be gone afterwards."""

import threading


def spoil(rt):
    """Change a bit of what this rank sends next."""
    send, transport = rt.transport.send_and_receive, rt.transport

    def flip(sends, receives):
        sends[0][1][5] ^= 1
        transport.send_and_receive = send
        return send(sends, receives)

    transport.send_and_receive = flip


def assert_groups_are_let_go():
    """No thread of this process listens for the ranks of a group any more."""
    for thread in threading.enumerate():
        if thread.name == "colo-signals":
            thread.join(60)
            assert not thread.is_alive()
