"""`python -m leadline.operator.crd`."""

import sys

from leadline.operator.crd.generate import main

if __name__ == "__main__":
    sys.exit(main())
