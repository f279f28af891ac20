"""Conversations in, shards out."""
