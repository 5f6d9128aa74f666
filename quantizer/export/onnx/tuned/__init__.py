"""Chooses what a file leaves in float: the blocks that integers make slower."""
