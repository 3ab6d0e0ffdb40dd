"""The byte scanner: trace events from JSON bytes straight into columns, compiled once in an installation.

codes.py says what the compiled code and its caller agree on, events.py reads events, output.py writes their rows, lexer.py
finds where strings and values end, decimals.py reads numbers, interning.py keeps strings, words.py looks at many bytes at a
time, entries.py are the doors, frame.py lays out the arrays, machine.py compiles, keeps and loads.
"""
