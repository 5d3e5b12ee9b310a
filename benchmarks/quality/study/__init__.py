"""Parts of ``benchmarks/quality/run.py``: text, models, training, measurements and the pieces of the study."""
