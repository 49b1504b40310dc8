"""How `kvcanary-trace run` traces a program that does not ask for it: `sitecustomize.py` here is put on its path."""
