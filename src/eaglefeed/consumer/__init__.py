"""Leases in, batches and a trained draft out."""
