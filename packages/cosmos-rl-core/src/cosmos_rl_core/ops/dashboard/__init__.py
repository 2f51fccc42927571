"""The page over run directories, `cosmos-rl dashboard`: a server that only reads files, and its static page.

    app       routes, live events            guard      token, host names, headers
    run       one run directory              health     sentences about a run
    curves    metrics by step, downsampled   rollouts   rollouts by byte offsets, prompts through time
    timeline  spans of processes             lines      JSON lines of files that grow

Nothing here is imported by a run; only this folder imports starlette for the page.
"""
