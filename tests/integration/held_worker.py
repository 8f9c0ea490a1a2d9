"""A worker extension that can hold its engine's process back, so that a test is never too late for requests."""

import time

from vllm.v1.engine.core import EngineCoreProc

from colo.engines.vllm.worker.agent import ColoWorker

STEP = EngineCoreProc._process_engine_step
NUM_TOKENS = 3
PATIENCE_S = 60


class HeldWorker(ColoWorker):
    """Name it as `worker_extension_cls`."""

    def hold(self, count):
        """Once `count` requests have come and those that run have a few tokens, stop until told something else.

        None is held by 0.
        """

        def held(core):
            running = core.scheduler.running
            is_full = len(running) == min(count, core.scheduler.max_num_running_reqs)
            is_complete = is_full and len(core.scheduler.requests) == count
            if is_complete and all(request.num_output_tokens >= NUM_TOKENS for request in running):
                EngineCoreProc._process_engine_step = STEP
                give_up_s = time.monotonic() + PATIENCE_S
                while core.input_queue.empty() and time.monotonic() < give_up_s:
                    time.sleep(0.001)
            return STEP(core)

        EngineCoreProc._process_engine_step = held if count else STEP
