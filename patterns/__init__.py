"""Patterns: the dataflow types, the pattern language, and one folder per family of fused ops.

Importing the package registers every pattern that a file below it declares.
"""

from tilewright.codegen.discovery import import_all

import_all(__name__, __path__)
