"""What the queue does a second, and what it costs: measured against the bounds that it must hold, and against peers.

`run` measures everything in interleaved rounds on one server; `musts` holds the bounds; `table` words the result. The
peers' drivers in `peers/` run in environments of their own and are never imported.
"""
