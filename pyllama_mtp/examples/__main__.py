"""``python -m pyllama_mtp.examples``: the list."""

from __future__ import annotations

from pyllama_mtp.examples import recipes

if __name__ == "__main__":
    found = recipes()
    width = max(map(len, found))
    print("python -m pyllama_mtp.examples.NAME [--model FILE], where NAME is one of\n")
    for name, summary in found.items():
        print(f"  {name:{width}}  {summary}")
