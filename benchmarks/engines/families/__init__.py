"""Runs small models of many families in the engines of language models."""
