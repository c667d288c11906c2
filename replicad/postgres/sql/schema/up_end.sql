-- Closes the script that installs part {part}.
UPDATE {part}_version SET version = {version}, digest = '{digest}', installed_at = clock_timestamp();
COMMIT;
