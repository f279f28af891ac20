"""What a sample is: refs, contract, batches. Pure: no I/O, no Redis."""
