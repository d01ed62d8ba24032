# make demo: checkpoint to answer; make test: the tests; make check: what a change must pass.
