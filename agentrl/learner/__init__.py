"""Evidence to better weights: rows, micro-batches, log-probs, optimizer steps, publication, checkpoints.

The order to read: `samples` (trajectory to rows), `batch` (rows to micro-batches), `model` (log-probs),
`critic` (values), `step` (one update), `publish` (weights out), `checkpoint` (resume).
"""
