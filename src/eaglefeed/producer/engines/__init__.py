"""Engines that run the target beside this process; each is imported only when it is chosen."""
