"""Mutation testing for attention: inject known bugs into a user's attention, and run the tests for each."""
