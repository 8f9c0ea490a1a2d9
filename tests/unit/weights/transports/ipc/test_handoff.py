"""Turns between one sender and its readers, in one process and with a sender that is gone."""

import json
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.errors import TransferError
from colo.weights.transports.ipc.handoff import ReaderHandoff, SenderHandoff

SLABS = 2


def never():
    return False


@settings(max_examples=25, deadline=None)
@given(readers=st.integers(1, 3), buckets=st.integers(0, 20), pauses=st.lists(st.integers(0, 2), max_size=20))
def test_every_reader_sees_every_bucket_in_order_and_none_is_overwritten_before(readers, buckets, pauses):
    turns = SenderHandoff(readers)
    slabs, seen = [None] * SLABS, [[] for _ in range(readers)]

    def read(number):
        mine = ReaderHandoff(turns.describe(), readers=readers, number=number)
        for index in range(buckets):
            mine.wait_filled(index + 1)
            if index < len(pauses) and pauses[index] == number:
                time.sleep(1e-3)
            seen[number].append(slabs[index % SLABS])
            mine.read(index + 1)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(readers)]
    for thread in threads:
        thread.start()
    for index in range(buckets):
        assert turns.wait_read(index - SLABS + 1, never)
        slabs[index % SLABS] = index
        turns.fill(index + 1)
    for thread in threads:
        thread.join()
    assert seen == [list(range(buckets))] * readers
    turns.close()


def test_readers_that_end_are_not_waited_for():
    turns = SenderHandoff(2)
    ReaderHandoff(turns.describe(), readers=2, number=0).read(5)
    assert not turns.wait_read(1, lambda: True)
    ReaderHandoff(turns.describe(), readers=2, number=3).read(1)  # of a larger group, of which this sender counts two
    assert turns.wait_read(1, never)
    turns.begin()
    assert not turns.wait_read(1, lambda: True)


def test_what_was_read_in_the_last_moment_counts():
    turns = SenderHandoff(1)
    reader = ReaderHandoff(turns.describe(), readers=1, number=0)
    assert turns.wait_read(1, lambda: reader.read(1) or True) is True


def test_what_is_closed_is_gone():
    turns = SenderHandoff(1)
    description = turns.describe()
    turns.close()
    with pytest.raises(TransferError):
        ReaderHandoff(description, readers=1, number=0)


def test_a_reader_that_fails_lets_the_sender_and_the_others_go():
    turns = SenderHandoff(2)
    one, other = (ReaderHandoff(turns.describe(), readers=2, number=number) for number in range(2))
    turns.fill(1)
    assert one.wait_filled(1)
    one.fail()
    assert other.wait_filled(1) and not other.wait_filled(2)
    assert not turns.wait_read(1, never)
    turns.stop()
    assert not other.wait_filled(2)


def test_a_sender_that_stops_is_not_waited_for():
    turns = SenderHandoff(1)
    reader = ReaderHandoff(turns.describe(), readers=1, number=0)
    turns.fill(3)
    turns.stop()
    reader.wait_filled(3)
    with pytest.raises(TransferError, match="the sender has stopped before bucket 4"):
        reader.wait_filled(4)


def test_a_sender_that_says_nothing_is_waited_for_until_the_deadline():
    turns = SenderHandoff(1)
    reader = ReaderHandoff(turns.describe(), readers=1, number=0, deadline_s=0.05)
    with pytest.raises(TransferError, match="the sender has said nothing for 0 s before bucket 1"):
        reader.wait_filled(1)


def test_a_sender_whose_process_has_ended_is_not_waited_for():
    code = """
import json, sys
from colo.weights.transports.ipc.handoff import SenderHandoff
turns = SenderHandoff(1)
print(json.dumps(turns.describe()), flush=True)
sys.stdin.read()
"""
    sender = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    reader = ReaderHandoff(json.loads(sender.stdout.readline()), readers=1, number=0)
    sender.kill()
    sender.communicate()
    with pytest.raises(TransferError, match="the sender has ended before bucket 1"):
        reader.wait_filled(1)
