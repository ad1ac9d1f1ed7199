"""`python -m nandoctor`.

In: the command line. Out: the exit code.
"""

from nandoctor.cli import main

if __name__ == "__main__":
    main()
