"""A fault of slices on their way to engines elsewhere."""


def spoil(rt):
    """Change a bit of what this rank sends next."""
    send, transport = rt.transport.send_and_receive, rt.transport

    def flip(sends, receives):
        sends[0][1][5] ^= 1
        transport.send_and_receive = send
        return send(sends, receives)

    transport.send_and_receive = flip
