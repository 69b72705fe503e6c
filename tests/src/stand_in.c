/* Stands in for each of the project's programs, by the name it is called by, where tests look at how they are packaged. It has
   their version, help and completions, and else says what it was asked for. */
#include <stdio.h>
#include <string.h>

int main(int argc, char **argv) {
    const char *slash = strrchr(argv[0], '/');
    const char *name = slash ? slash + 1 : argv[0];
    const char *first = argc > 1 ? argv[1] : "";
    if (strcmp(first, "--version") == 0) {
        printf("%s %s\n", name, VERSION);
    } else if (strcmp(first, "--help") == 0) {
        printf("Stands in for %s.\n\nUsage: %s [OPTIONS]\n       %s <COMMAND>\n\nCommands:\n  help  Print this\n\n", name, name, name);
        printf("Options:\n      --listen <ADDR>\n          Where to listen\n          \n          [default: 127.0.0.1:8080]\n");
    } else {
        printf("%s:", name);
        for (int i = 1; i < argc; i++) {
            printf(" %s", argv[i]);
        }
        printf("\n");
    }
    return 0;
}
