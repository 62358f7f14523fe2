"""``python -m dspark_ext bench``: the objective's time and memory next to PyTorch's.

``problem`` makes the inputs, ``contenders`` holds the implementations, ``timing`` runs them in
turn, ``memory`` measures each in a process of its own with ``peak``, ``report`` prints, ``cli``
ties them up.
"""
