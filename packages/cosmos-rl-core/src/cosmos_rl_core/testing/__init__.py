"""For tests, here and in packages that plug in: conformance suites, a tiny domain, weights in files."""
