from smaragdine.cli.main import program

program()
