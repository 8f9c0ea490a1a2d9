"""Functions run in processes forked from the test's."""

import os
import pickle

import torch


def start(function):
    """Begin to run `function` in a forked process; returns what waits for it and gives its result, or its error."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            # Makes torch's pool of threads anew, which two threads of a forked process cannot do at once. vLLM puts a
            # function that does nothing in place of `torch.set_num_threads` when it starts in this process on a CPU.
            torch._C.set_num_threads(1)
            try:
                found = function()
            except Exception as error:  # noqa: BLE001 - which the test compares
                found = f"{type(error).__name__}: {error}"
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(found, pipe)
        finally:
            os._exit(0)
    os.close(writer)

    def result():
        with os.fdopen(reader, "rb") as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        return pickle.loads(told) if told else None  # for one that was killed

    return result
