"""An oracle for optimizers: a run that was saved and resumed against the optimizer's own calls.

    python -m tests.support.optimizers                        # torch's optimizers, all scenes
    python -m tests.support.optimizers --library timm --scene two_groups --match Lamb

Each row trains, saves, loads into another model and optimizer, and trains on. Every weight and
every entry of the optimizer's state is compared, bit for bit, with the same run through the
optimizer's own `state_dict` and `load_state_dict`. `cases.py` says how each optimizer is built,
`scenes.py` what differs between the rows, `rows.py` runs one, `ranks.py` runs one on two ranks.
"""
