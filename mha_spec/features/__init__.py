"""Specifications of features that only some layers have: a module for each."""
