"""The command line, `autopar`: plans for models and clusters that are not there, and looks at plans.

In: arguments (options.py). Out: text on stdout, progress and errors on stderr. **Add a command in a file of its own and name it in main.py.** What a command needs
is imported when it runs: help and looks at plans need no torch.
"""
