"""Collections of garbage look at what tests make, and not at a million objects that were imported.

vLLM freezes the heap as an engine starts, and unfreezes it and collects all of it, three times, as one ends: most of
the time that a tiny engine takes. Here it does neither.
"""

import gc

_freeze, thaw = gc.freeze, gc.unfreeze
gc.freeze = gc.unfreeze = lambda: None


def freeze():
    """Leave all that is there now to itself, but for what is garbage."""
    gc.collect()
    _freeze()


freeze()  # also where processes are forked from
