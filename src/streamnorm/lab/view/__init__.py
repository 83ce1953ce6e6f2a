"""How results are shown: figures, and one page of everything.

Nothing is computed here that is not in the results (`..measures`, `..claims`).
"""
