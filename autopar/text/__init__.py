"""Text that people and files hold: sizes and times with units ("80 GB", "8 min 5 s"), JSON that is read strictly.

In: strings and bytes of unknown origin. Out: values, or an error that says what is wrong with them and where.
"""
