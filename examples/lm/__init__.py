"""Parts of ``examples/train_lm.py``: text, model, training, measurements and the report."""
