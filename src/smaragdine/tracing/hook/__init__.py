"""What runs inside the program: standard library alone, Python 3.8 and later, silent whatever happens.

In the program this package is called `_smaragdine_hook`, so that it never meets an installed `smaragdine`.
"""
