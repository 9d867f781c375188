/* A stand-in nvidia-cuda-mps-control: keeps what it is told. Started with -d it creates the pipe folder's control file;
 * else it reads commands from its standard input and appends each to $CUDA_MPS_LOG_DIRECTORY/control.log, and answers
 * those that have an answer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static FILE *open_in(const char *variable, const char *fallback, const char *name)
{
    char path[4096];
    const char *folder = getenv(variable);
    folder = folder && *folder ? folder : fallback;
    mkdir(folder, 0755);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "ae");
    if (!file)
        perror(path);
    return file;
}

int main(int argc, char **argv)
{
    char line[4096], share[64] = "100.0";
    if (argc > 1 && strcmp(argv[1], "-d") && strcmp(argv[1], "-f")) {
        fprintf(stderr, "usage: nvidia-cuda-mps-control [-d | -f]\n");
        return 1;
    }
    FILE *log = open_in("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps", "control.log");
    if (!log)
        return 1;
    if (argc > 1 && argv[1][1] == 'd') {
        FILE *pipe = open_in("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps", "control");
        if (!pipe)
            return 1;
        fclose(pipe);
        fputs("start\n", log);
        return fclose(log) != 0;
    }
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        fprintf(log, "%s\n", line);
        fflush(log);
        if (!strncmp(line, "set_default_active_thread_percentage ", 37))
            snprintf(share, sizeof share, "%.60s", line + 37);
        if (!strcmp(line, "get_default_active_thread_percentage") || !strncmp(line, "set_default_active", 18))
            puts(share);
        else if (!strcmp(line, "quit"))
            break;
    }
    return fclose(log) != 0;
}
