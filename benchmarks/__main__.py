"""The command line ``python -m benchmarks``: times op families, compares two runs, draws a report."""

from htree_ops.cli import Program, run_program
from htree_ops.version import __version__

PROGRAM = Program(
    "python -m benchmarks",
    "Times the ops of htree_ops beside baselines.",
    {
        "run": ("benchmarks.harness.run", "time the ops of families beside their baselines"),
        "compare": ("benchmarks.harness.compare", "say what became slower between two runs"),
        "report": ("benchmarks.harness.report", "draw the results of run: an HTML page and pictures"),
    },
    f"htree_ops {__version__}",
)

if __name__ == "__main__":
    run_program(PROGRAM.main)
