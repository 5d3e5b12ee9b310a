"""The command line ``python -m htree_ops``; every other entry point of the package calls these commands."""

from htree_ops.cli import Program, run_program
from htree_ops.version import __version__

PROGRAM = Program(
    "python -m htree_ops",
    "Describes, tunes, measures and checks this installation of htree_ops.",
    {
        "info": ("htree_ops.info", "print versions, GPUs, ops and how the library was built"),
        "tune": ("htree_ops.tuning.command", "find and store the fastest kernel configurations on this GPU"),
        "io-only": ("htree_ops.bench.io_only", "time tree attention beside kernels that only move its data"),
        "correctness": (
            "htree_ops.correctness",
            "check the ops of this installation against float64 references",
        ),
    },
    f"htree_ops {__version__}",
)

if __name__ == "__main__":
    run_program(PROGRAM.main)
