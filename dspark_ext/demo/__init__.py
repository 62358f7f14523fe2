"""A real training run: a block-parallel drafter for SmolLM2-135M, trained on a CPU in minutes.

    python -m dspark_ext demo

In reading order: `target` runs the target model over a text and keeps its hidden states,
`drafter` is the model (how the loss's inputs are made), `train` the loop (how the loss is used),
`report` the table and the picture, `cli` the command.

Importing this package imports nothing else; the modules need ``pip install 'dspark_ext[demo]'``,
except `drafter`, which needs torch alone.
"""
