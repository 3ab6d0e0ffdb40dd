"""The byte scanner: trace events from JSON bytes straight into columns, compiled once in an installation.

codes.py says what the compiled code and its caller agree on, events.py reads events, lexer.py finds where strings and values
end, decimals.py reads numbers, interning.py keeps strings, entries.py are the doors, machine.py compiles, keeps and loads.
"""
