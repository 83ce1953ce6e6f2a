"""What this machine makes of the package: its devices, whether all backends agree with the law, and what layers cost.

Nothing is trained to learn anything here, and no result depends on it.
"""
