"""The `leadline` command. `main.main` is the console entry point; each subcommand lives in a module of its
own that is imported only when it runs, so that `leadline --help` answers at once."""
