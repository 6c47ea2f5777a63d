"""Many runs → curves → the best limit. Numbers in, numbers out."""
