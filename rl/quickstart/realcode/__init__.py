"""The quickstart's larger sibling: small functions of real packages, which a policy repairs by trying."""
