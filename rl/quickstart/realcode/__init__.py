"""This package is the quickstart's larger sibling: a policy repairs small functions of real packages by trying."""
