"""Patterns: the dataflow types, the pattern language, and one folder for each family of fused ops.

Importing the package registers every pattern that one of its files declares.
"""

from tilewright.codegen.discovery import import_all

import_all(__name__, __path__)
