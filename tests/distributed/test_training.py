"""examples/train_distributed.py: the losses do not depend on the mesh, and a run goes on after a rank was lost."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import same_losses
import training_on_ranks
from process_pool import Pool, started

import htree_ops

SCRIPT = training_on_ranks.EXAMPLES / "train_distributed.py"
MODEL = "--layers 2 --dim 32 --heads 4 --kv-heads 2 --compression-rate 4 --top-k 4 --max-top-nodes 16"
TINY = f"{MODEL} --device cpu --context 128 --batch 2 --eval-windows 2 --eval-every 3 --steps 6"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A few sources to learn from."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(24):
        (folder / f"part{i}.py").write_text(f"def function_{i}(x):\n    return x + {i}\n" * 20)
    return folder


@pytest.fixture(scope="module")
def alone():
    yield from started(1)


@pytest.fixture(scope="module")
def reference(text, alone, tmp_path_factory):
    """The losses of six steps of one process."""
    (found,) = alone.run(training_on_ranks.train, flags(text, tmp_path_factory.mktemp("one")))
    assert found["status"] == 0
    losses = found["train_bits_per_byte"]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.1
    return losses


def flags(text: Path, out: Path, *more: str) -> list[str]:
    return [*TINY.split(), "--text", str(text), "--out", str(out), *more]


@pytest.mark.parametrize("way", ["data", "context", "tensor"])
def test_the_losses_are_those_of_one_process(way, text, pair, reference, tmp_path):
    for found in pair.run(training_on_ranks.train, flags(text, tmp_path, f"--{way}-parallel", "2")):
        assert found["status"] == 0
        assert found["train_bits_per_byte"] == pytest.approx(reference, abs=2e-4)
        assert [step for step, _ in found["validation_bits_per_byte"]] == [3, 6]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    "ways", [("data", "context"), ("data", "tensor"), ("context", "tensor")], ids="-".join
)
def test_the_losses_on_meshes_of_two_dimensions(ways, text, ranks, reference, tmp_path):
    mesh = [word for way in ways for word in (f"--{way}-parallel", "2")]
    for found in ranks.run(training_on_ranks.train, flags(text, tmp_path, *mesh)):
        assert found["status"] == 0
        assert found["train_bits_per_byte"] == pytest.approx(reference, abs=2e-4)


@pytest.mark.parametrize("ways", [("context",), ("tensor",), ("context", "tensor")], ids="-".join)
def test_an_index_learns_on_a_mesh(ways, text, alone, pair, ranks, tmp_path):
    """In four steps at the positions of one process; what it has learned decides what the validation reads."""
    mesh = [word for way in ways for word in (f"--{way}-parallel", "2")]
    found = []
    for pool, more in ((alone, []), (ranks if len(ways) > 1 else pair, mesh)):
        many = [*flags(text, tmp_path / str(len(found)), *more), "--dim", "64", "--steps", "4"]
        found.append(pool.run(training_on_ranks.train, many)[0])
        assert (found[-1]["status"], found[-1]["settings"]["index_dim"]) == (0, 16)
    one, many = found
    for curve in ("train_bits_per_byte", "validation_bits_per_byte"):
        assert many[curve] == [pytest.approx(x, abs=1e-3) for x in one[curve]]


def test_rounding_and_a_wrong_gradient_are_told_apart(text, alone, pair, tmp_path):
    """In bf16 at the learning rate of two_gpus.sh, by its judge."""

    def train(pool, name, *more, broken=False):
        usual = ["--context", "1024", "--steps", "20", "--eval-every", "20", "--learning-rate", "0.0003"]
        many = [*flags(text, tmp_path / name), *usual, *more]
        assert all(found["status"] == 0 for found in pool.run(training_on_ranks.train_in_bf16, many, broken))
        return str(tmp_path / name)

    one = train(alone, "one")
    ways = [train(pair, way, f"--{way}-parallel", "2") for way in ("data", "context", "tensor")]
    assert same_losses.main([one, *ways]) == 0
    assert same_losses.main([one, train(pair, "broken", "--context-parallel", "2", broken=True)]) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["data", "context", "tensor"])
def test_the_losses_on_gpus_are_those_of_one_process(way, text, gpus, reference, tmp_path):
    """Two GPUs, or one with a group of one; parameters are bf16 in the products."""
    more = f"--device cuda --{way}-parallel {len(gpus.processes)}".split()
    for found in gpus.run(training_on_ranks.train, flags(text, tmp_path, *more)):
        assert found["status"] == 0
        assert found["train_bits_per_byte"] == pytest.approx(reference, abs=0.1)
    for found in gpus.run(training_on_ranks.train, flags(text, tmp_path, *more, "--resume", "--steps", "8")):
        assert len(found["train_bits_per_byte"]) == 8


def test_a_run_that_lost_a_rank_goes_on_under_another_mesh(text, alone, reference, tmp_path):
    many = flags(text, tmp_path, "--context-parallel", "2", "--save-every", "2")
    pool = Pool(2)
    try:
        kill = (training_on_ranks.train_and_signal, many, 1, 3, signal.SIGKILL)
        outcomes = pool.outcomes(*kill, killed=(1,))
    finally:
        pool.close()
    assert not outcomes[0][0], "the rank that is left has not noticed"
    assert (tmp_path / "latest").read_text() == "step-000002"
    (found,) = alone.run(training_on_ranks.train, flags(text, tmp_path, "--resume"))
    assert found["train_bits_per_byte"] == pytest.approx(reference, abs=2e-4)


def test_a_signal_to_one_rank_ends_all_after_the_same_step(text, pair, reference, tmp_path):
    many = flags(text, tmp_path, "--tensor-parallel", "2")
    stopped = pair.run(training_on_ranks.train_and_signal, many, 1, 2, signal.SIGTERM)
    assert stopped == [{"status": 130}] * 2
    assert (tmp_path / "latest").read_text() == "step-000004"
    for found in pair.run(
        training_on_ranks.train, flags(text, tmp_path, "--resume")
    ):  # with --data-parallel 2
        assert found["train_bits_per_byte"] == pytest.approx(reference, abs=2e-4)


def test_a_run_goes_on_with_its_own_learning_rate(text, alone, tmp_path):
    first = flags(text, tmp_path, "--steps", "2", "--learning-rate", "0.001")
    assert alone.run(training_on_ranks.train, first)[0]["settings"]["learning_rate"] == 0.001
    (found,) = alone.run(training_on_ranks.train, flags(text, tmp_path, "--resume", "--steps", "3"))
    assert found["settings"]["learning_rate"] == 0.001
    assert len(found["train_bits_per_byte"]) == 3


def test_a_rank_that_raises_ends_the_others_in_time(text, tmp_path):
    """A rank that shares no group with it but the whole waits for others, in groups of the mesh."""
    pool = Pool(4, seconds=10)
    mesh = ["--context-parallel", "2", "--tensor-parallel", "2", "--timeout", "10"]
    many = flags(text, tmp_path, *mesh)
    try:
        kinds = [kind for kind, _ in pool.refusals(training_on_ranks.train_and_raise, many, 0, 1)]
    finally:
        pool.close()
    assert kinds[0] == "ValueError"
    assert "ValueError" not in kinds[1:]


def test_a_new_run_that_dies_while_it_saves_leaves_no_mixture(text, alone, tmp_path):
    """Its checkpoint has the name of one that was there before, and is not whole."""
    assert alone.run(training_on_ranks.train, flags(text, tmp_path))[0]["status"] == 0
    assert (tmp_path / "latest").read_text() == "step-000006"
    again = flags(text, tmp_path, "--seed", "1")
    ((kind, _),) = alone.refusals(training_on_ranks.train_and_fail_to_save, again)
    assert kind == "OSError"
    (found,) = alone.run(training_on_ranks.refused, flags(text, tmp_path, "--resume"))
    assert "--resume: there is no" in found["stderr"]


def test_ranks_of_torchrun(text, tmp_path):
    """The command of the documentation."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPT)]
    found = subprocess.run(
        [*command, *flags(text, tmp_path, "--context-parallel", "2", "--steps", "2")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(htree_ops.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    assert "mesh: data 1, context 2, tensor 1; each rank on a CPU, with 64 of the 128 tokens" in found.stdout
    assert "bits per byte after 2 steps" in found.stdout


def test_leaving_skips_the_end_of_the_interpreter():
    """While that runs, a thread of gloo that drops a tensor aborts the process."""
    words = """if True:
        import atexit
        import torch.distributed as dist
        from lm.parallel import leave
        atexit.register(print, "the interpreter ends")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        print("left")
        leave(3)
    """
    paths = [str(training_on_ranks.EXAMPLES), str(Path(htree_ops.__file__).parents[1])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    found = subprocess.run(
        [sys.executable, "-c", words], env=env, capture_output=True, text=True, timeout=120
    )
    assert (found.returncode, found.stdout) == (3, "left\n"), found.stderr


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--context-parallel 3", "must be the 2 ranks, got 1 * 3 * 1 = 3"),
        ("--data-parallel 2 --batch 3", "--batch must be a multiple of --data-parallel = 2, got 3"),
        ("--context-parallel 2 --context 120", "--context must be a multiple of 2 * context-parallel"),
        ("--tensor-parallel 2 --kv-heads 1", "--kv-heads must be a multiple of --tensor-parallel = 2, got 1"),
        ("--resume", "--resume: there is no"),
        ("--save-every 0", "--save-every must be at least 1, got 0"),
        ("--timeout 0", "--timeout must be between 1 and 2147483647 seconds, got 0.0"),
        ("--timeout nan", "--timeout must be between 1 and 2147483647 seconds, got nan"),
    ],
)
def test_wrong_flags_end_every_rank_in_one_line(more, message, text, pair, tmp_path):
    for found in pair.run(training_on_ranks.refused, flags(text, tmp_path, *more.split())):
        assert found["status"] == 2
        assert message in found["stderr"], found
        assert found["stderr"].count("\n") == 1
