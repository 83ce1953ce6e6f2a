"""How results are shown: figures, and one page of everything."""
