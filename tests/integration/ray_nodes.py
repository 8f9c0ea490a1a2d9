"""`examples/ray_grpo.py` on a cluster of nodes of this machine, one of which is lost on the way: `ray_nodes.py MODEL`.

What it prints is the example's, with a line for the node that is killed and one for each rank of `run_ranks`.
"""

import os
import runpy
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from colo.integrations import ray as integration
from colo.integrations.ray import Servers, run_ranks
from tests import warm


def add_up(more):
    """A rank's share of a sum over gloo."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    found = torch.tensor([distributed.get_rank() + more])
    distributed.all_reduce(found)
    distributed.destroy_process_group()
    if more < 0:
        raise ValueError("less than nothing")
    return int(found), ray.get_runtime_context().get_node_id()


def check_ranks():
    group = ray.util.placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
    found = run_ranks(add_up, group, 10, bundles=[0, 1])
    assert [value for value, _ in found] == [21, 21] and len({node for _, node in found}) == 2
    try:
        run_ranks(add_up, group, -10, bundles=[0, 1])
    except ValueError as error:
        told = f"ranks: {' '.join(str(value) for value, _ in found)} and {error}\n"
        sys.stdout.write(told)
    ray.util.remove_placement_group(group)


class Watched:
    """Standard output; after the third step a node is killed, and another joins."""

    def __init__(self, out, cluster, node):
        self.out, self.cluster, self.node, self.is_due = out, cluster, node, False

    def write(self, text):
        written = self.out.write(text)
        self.is_due |= text.startswith("step   2 ")
        if self.is_due and text.endswith("\n"):
            self.is_due = False
            self.cluster.remove_node(self.node, allow_graceful=False)
            self.cluster.add_node(num_cpus=1)
            self.out.write("a node is lost\n")
        return written

    def __getattr__(self, name):
        return getattr(self.out, name)


def forked(command, *arguments, **options):
    """The example's servers with engine and worker in one process, a fork of the server's.

    On a CPU they would be two, which take turns, and import vLLM once more.
    """
    python, module, _, *given = command
    assert module == "-m"
    start = "import sys; from tests import warm; warm.serve_here(sys.argv[1:])"
    command = [python, "-c", start, *given, "--distributed-executor-backend", warm.IN_ONE_PROCESS]
    return Servers(command, *arguments, **options)


def main(model):
    integration.Servers = forked
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    cluster.add_node(num_cpus=1)
    lost = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    check_ranks()
    sys.stdout = Watched(sys.stdout, cluster, lost)
    example = Path(__file__).parents[2] / "examples" / "ray_grpo.py"
    sys.argv = [str(example), "--model", model, "--device", "cpu", "--steps", "8", "--learning-rate", "5e-3"]
    runpy.run_path(str(example), run_name="__main__")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    main(sys.argv[1])
