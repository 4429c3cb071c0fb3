"""A run is a folder: what was asked for, what happened and what was measured, as plain files.

    runs/<time>-<name>-<id>/
        run.json                          written once
        lock                              held by the process that trains
        events-<writer>-<attempt>.jsonl   what happened
        metrics-<attempt>.jsonl           one row per reported step
        evals-<writer>.jsonl              scores
        checkpoints/                      see dwslm.train.checkpoint

Everything else (tracker, index, page) is derived from these and may be deleted.
"""
